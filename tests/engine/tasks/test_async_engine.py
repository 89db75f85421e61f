"""AsyncEngine: tasks share passes; cancelled tasks, timeouts and streams that are left give their pages back."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from engine import AsyncEngine, CoppiceError, Done, Engine, Prefill, Progress, Request, Text, UsageError
from engine.demo import demo_folder
from engine.service import Service
from models.shard import Shard
from search import Greedy, Sample, Trie
from tests.invariants import check_pool
from tools.random_checkpoint import make

LIMIT = 60  # seconds, for what would wait for ever


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, layers=1, width=32, mlp=32, heads=2, kv_heads=1, vocab=260, max_positions=30000, seed=1, scale=0.7)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.load(folder, kv_memory=1 << 22, threads=1)


@pytest.fixture(autouse=True)
def no_page_is_lost(engine):
    yield
    check_pool(engine.pool, [])
    assert engine.pool.used_pages == 0


def run(test):
    """Run a coroutine to its end, or fail."""

    async def limited():
        async with asyncio.timeout(LIMIT):
            return await test

    return asyncio.run(limited())


def outputs(results):
    return [[output.token_ids for output in result.outputs] for result in results]


async def used(asynchronous):
    """Pages in use before the next step; the pool is checked on the way."""
    pool = asynchronous.engine.pool

    def read():
        trees = [tree for job in asynchronous._service.driver.running for tree in job.trees]
        check_pool(pool, [page for tree in trees for page in tree.pages_held])
        return pool.used_pages

    future = Future()
    asynchronous._thread.call(lambda: future.set_result(read()))
    return await asyncio.wrap_future(future)


ENDLESS = {"max_new_tokens": 29000, "ignore_eos": True}
PROMPTS = [[1, 5 + i] for i in range(20)]
SEARCHES = [Greedy(), Trie(beams=3), Sample(seed=3, num_return_sequences=2), Trie(beams=2, num_return_sequences=2)]


def slow_search():
    """A search whose check waits: itself, an event that its check has begun, and one that lets it go on."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(Greedy):
        def check(self, vocab_size, eos_token_ids):
            entered.set()
            assert leave.wait(LIMIT)

    return Slow(), entered, leave


# --- answers ---


def test_twenty_tasks_share_passes_and_get_what_they_get_alone(engine):
    alone = [engine.generate([prompt], SEARCHES[i % 4], max_new_tokens=12)[0] for i, prompt in enumerate(PROMPTS)]

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            answers = await asyncio.gather(
                *(
                    asynchronous.generate([prompt], SEARCHES[i % 4], max_new_tokens=12)
                    for i, prompt in enumerate(PROMPTS)
                )
            )
            return [result for [result] in answers], asynchronous._service.driver.work["target"].passes

    together, passes = run(test())
    assert outputs(together) == outputs(alone)
    assert passes < sum(result.stats["forward_passes"] for result in alone) / 4


def test_one_request_several_prompts_and_none(engine):
    request = Request(PROMPTS[0], Trie(beams=3), 6)
    expected = engine.generate(PROMPTS[:5], Greedy(), max_new_tokens=6)

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            one = await asynchronous.generate(request)
            several = await asynchronous.generate(PROMPTS[:5], Greedy(), max_new_tokens=6)
            return one, several, await asynchronous.generate([], Greedy())

    one, several, none = run(test())
    assert outputs([one]) == outputs(dict(engine.serve([request])).values())
    assert outputs(several) == outputs(expected) and none == []


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_a_stream_has_the_events_of_the_engines(engine, search):
    slow = Request([1] + [9] * 80, search, 20)
    budget, engine.runner.budget = engine.runner.budget, 10

    async def test():
        text, told, done = "", [], None
        async with AsyncEngine(engine) as asynchronous:
            async for event in asynchronous.stream(slow):
                assert done is None, "nothing comes after Done"
                match event:
                    case Prefill(read, total):
                        assert not text and total == 81
                        told.append(read)
                    case Text(more):
                        assert more
                        text += more
                    case Progress(report, _):
                        await used(asynchronous)  # the search goes on, and the report stays valid
                        assert report.best is None or len(report.best()) <= 20
                        assert report.beams is None or [*report.beams()]
                    case Done(result):
                        done = result
        return text, told, done

    try:
        text, told, done = run(test())
        [(_, expected)] = engine.serve([slow])
    finally:
        engine.runner.budget = budget
    assert told and told == sorted({*told}) and done is not None
    assert outputs([done]) == outputs([expected]) and text == expected.outputs[0].text


def test_a_slow_reader_misses_no_text(engine):
    async def test():
        async with AsyncEngine(engine) as asynchronous:
            stream = asynchronous.stream([1, 7], Greedy(), max_new_tokens=200, ignore_eos=True)
            events = [await anext(stream)]
            while asynchronous._service.busy:
                await asyncio.sleep(0.01)
            events += [event async for event in stream]
            return events

    events = run(test())
    assert len(events) < 10 and isinstance(events[-1], Done)
    assert "".join(event.text for event in events if isinstance(event, Text)) == events[-1].result.outputs[0].text


def test_loading_and_scores():
    async def test():
        async with await AsyncEngine.load(demo_folder("reward"), kv_memory=1 << 22, threads=1) as asynchronous:
            several = await asyncio.gather(*(asynchronous.scores([[1, i], [1, 2, i]]) for i in range(3, 6)))
            with pytest.raises(UsageError, match="expected token ids from 0 to "):
                await asynchronous.scores([[5000]])
            return several, asynchronous.engine

    several, reward = run(test())
    assert several == [pytest.approx(reward.scores([[1, i], [1, 2, i]]), abs=1e-5) for i in range(3, 6)]


# --- cancelled tasks ---


async def started(asynchronous, task):
    """Wait until a task's search has pages."""
    while not await used(asynchronous):
        assert not task.done(), task
        await asyncio.sleep(0)


def test_a_cancelled_task_ends_its_search_before_the_next_step(engine):
    async def test():
        async with AsyncEngine(engine) as asynchronous:
            task = asyncio.create_task(asynchronous.generate(PROMPTS[:3], Trie(beams=3), **ENDLESS))
            await started(asynchronous, task)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await used(asynchronous) == 0
            return await asynchronous.generate(PROMPTS[:2], Greedy(), max_new_tokens=5)

    assert outputs(run(test())) == outputs(engine.generate(PROMPTS[:2], Greedy(), max_new_tokens=5))


def test_a_timeout_ends_the_search(engine):
    async def test():
        async with AsyncEngine(engine) as asynchronous:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asynchronous.generate(PROMPTS[:2], Greedy(), **ENDLESS)
            assert await used(asynchronous) == 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    async for _ in asynchronous.stream(PROMPTS[0], Trie(beams=3), **ENDLESS):
                        pass
            assert await used(asynchronous) == 0

    run(test())


def test_others_go_on_beside_cancelled_ones(engine):
    expected = engine.generate(PROMPTS, Trie(beams=3), max_new_tokens=12)

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            tasks = [
                asyncio.create_task(asynchronous.generate([prompt], Trie(beams=3), max_new_tokens=12))
                for prompt in PROMPTS
            ]
            gone = [asyncio.create_task(asynchronous.generate([prompt], Sample(), **ENDLESS)) for prompt in PROMPTS]
            for i, task in enumerate(gone):
                for _ in range(i % 4):
                    await asyncio.sleep(0.005)
                task.cancel()
            done = await asyncio.gather(*gone, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in done)
            answers = [result for [result] in await asyncio.gather(*tasks)]
            assert await used(asynchronous) == 0
            return answers

    assert outputs(run(test())) == outputs(expected)


@pytest.mark.parametrize("events", [1, 2, 6])
def test_leaving_a_stream_ends_its_search(engine, events):
    async def test():
        async with AsyncEngine(engine) as asynchronous:
            count = 0
            async for _ in asynchronous.stream(PROMPTS[0], Trie(beams=3), **ENDLESS):
                count += 1
                if count == events:
                    break
            assert await used(asynchronous) == 0
            stream = asynchronous.stream(PROMPTS[0], Greedy(), **ENDLESS)
            await anext(stream)
            assert await used(asynchronous) > 0
            await stream.aclose()
            assert await used(asynchronous) == 0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(test())


def test_a_cancelled_check_submits_nothing(engine):
    slow, entered, leave = slow_search()

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            task = asyncio.create_task(asynchronous.generate(PROMPTS[:1], slow, **ENDLESS))
            await asyncio.to_thread(entered.wait)
            behind = asyncio.create_task(asynchronous.generate(PROMPTS[:1], Greedy(), **ENDLESS))
            await asyncio.sleep(0.01)
            for each in (task, behind):
                each.cancel()
            leave.set()
            await asyncio.gather(task, behind, return_exceptions=True)
            [result] = await asynchronous.generate(PROMPTS[:1], Greedy(), max_new_tokens=3)
            assert task.cancelled() and behind.cancelled() and await used(asynchronous) == 0
            return asynchronous._service.driver.work["target"].passes, result

    passes, result = run(test())
    assert passes == result.stats["forward_passes"]


# --- errors ---


class Broken(Greedy):
    """Fails at its first step, or when it is checked."""

    def run(self, task):
        yield from ()
        raise KeyError("on purpose")


def test_an_error_reaches_its_task_alone(engine):
    def fails(ids, scores):
        raise ValueError("on purpose")

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            return await asyncio.gather(
                asynchronous.generate(PROMPTS[:2], Greedy(), max_new_tokens=20),
                asynchronous.generate([[1, 2], [260]], Greedy(), **ENDLESS),
                asynchronous.generate([[1, 2], [1, 3]], Broken()),
                asynchronous.generate([[1, 2]], Greedy(), logits_processor=fails),
                asynchronous.generate(PROMPTS[2:4], Trie(beams=3), max_new_tokens=20),
                return_exceptions=True,
            )

    fine, refused, broken, hook, also = run(test())
    assert isinstance(refused, UsageError) and "got 260" in refused.what
    assert isinstance(broken, CoppiceError) and "KeyError: 'on purpose'" in broken.what
    assert isinstance(hook, CoppiceError) and "on purpose" in str(hook)
    assert outputs(fine) == outputs(engine.generate(PROMPTS[:2], Greedy(), max_new_tokens=20))
    assert outputs(also) == outputs(engine.generate(PROMPTS[2:4], Trie(beams=3), max_new_tokens=20))


def test_an_answer_that_fails_ends_itself_alone(engine, monkeypatch):
    """A failure after the pass, such as a text that cannot be decoded, is no fault of the pass."""
    report = Service._report

    def fails(self, entry):
        if entry.checked.request.prompt == PROMPTS[1]:
            raise RuntimeError("on purpose")
        report(self, entry)

    monkeypatch.setattr(Service, "_report", fails)

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            return await asyncio.gather(
                *(asynchronous.generate([prompt], Greedy(), max_new_tokens=8) for prompt in PROMPTS[:3]),
                return_exceptions=True,
            )

    first, failed, third = run(test())
    assert isinstance(failed, CoppiceError) and "the answer failed: RuntimeError: on purpose" in failed.what
    assert outputs([*first, *third]) == outputs(engine.generate(PROMPTS[:3:2], Greedy(), max_new_tokens=8))


def test_a_failed_pass_ends_its_requests_and_the_engine_goes_on(engine, monkeypatch):
    async def test():
        async with AsyncEngine(engine) as asynchronous:
            stream = asynchronous.stream(PROMPTS[0], Greedy(), **ENDLESS)
            task = asyncio.create_task(asynchronous.generate(PROMPTS[1:3], Greedy(), **ENDLESS))
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(engine.runner, "pack", lambda *_: 1 / 0)
                with pytest.raises(CoppiceError, match="a forward pass failed: ZeroDivisionError"):
                    await task
                with pytest.raises(CoppiceError, match="a forward pass failed"):
                    async for _ in stream:
                        pass
            assert await used(asynchronous) == 0
            return await asynchronous.generate(PROMPTS[:1], Greedy(), max_new_tokens=3)

    assert len(run(test())[0].outputs[0].token_ids) == 3


def test_a_thread_that_fails_leaves_nobody_waiting(engine, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            task = asyncio.create_task(asynchronous.generate(PROMPTS[:1], Greedy(), **ENDLESS))
            await started(asynchronous, task)

            def stop():
                raise SystemExit("on purpose")

            asynchronous._thread.call(stop)
            with pytest.raises(CoppiceError, match="the thread that steps failed: SystemExit: on purpose"):
                await task
            with pytest.raises(CoppiceError, match="the thread that steps failed"):
                await asynchronous.generate(PROMPTS[:1], Greedy())

    run(test())


def test_wrong_calls(engine):
    request = Request(PROMPTS[0], Greedy(), 3)

    async def test():
        async with AsyncEngine(engine) as asynchronous:
            for call in (
                asynchronous.generate("text", Greedy()),
                asynchronous.generate(3, Greedy()),
                asynchronous.generate(PROMPTS[:1]),
                asynchronous.generate(PROMPTS[:1], Greedy(), max_tokens=3),
                asynchronous.generate(request, Greedy()),
                asynchronous.generate(request, max_new_tokens=3),
                asynchronous.scores([[1, 2]]),
            ):
                with pytest.raises(UsageError):
                    await call
            with pytest.raises(UsageError, match="did you mean max_new_tokens"):
                asynchronous.stream(PROMPTS[0], Greedy(), max_tokens=3)

    run(test())
    engine.shard = Shard(0, 2)
    try:
        with pytest.raises(UsageError, match="processes that share a model"):
            AsyncEngine(engine)
    finally:
        engine.shard = Shard()


# --- the end ---


def test_close_ends_everything_with_an_error(engine):
    slow, entered, leave = slow_search()

    async def test():
        asynchronous = AsyncEngine(engine)
        stream = asynchronous.stream(PROMPTS[0], Greedy(), **ENDLESS)
        await anext(stream)
        tasks = [asyncio.create_task(asynchronous.generate([prompt], Greedy(), **ENDLESS)) for prompt in PROMPTS]
        # The second check waits for the first.
        tasks += [asyncio.create_task(asynchronous.generate(PROMPTS[:1], slow, **ENDLESS)) for _ in range(2)]
        await asyncio.to_thread(entered.wait)
        closing = asyncio.create_task(asynchronous.close())
        while not asynchronous._thread._ended:
            await asyncio.sleep(0.001)
        leave.set()
        await closing
        await asynchronous.close()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {(type(error), str(error)) for error in errors} == {(CoppiceError, "the engine was closed")}
        with pytest.raises(CoppiceError, match="closed"):
            async for _ in stream:
                pass
        for call in (asynchronous.generate(PROMPTS[:1], Greedy()), asynchronous.scores([[1]])):
            with pytest.raises(CoppiceError, match="closed"):
                await call

    run(test())
    assert len(engine.generate(PROMPTS[:1], Greedy(), max_new_tokens=3)) == 1  # it can be used again


def test_two_event_loops_at_once(engine):
    expected = engine.generate(PROMPTS[:6], Greedy(), max_new_tokens=30)
    asynchronous, answers = AsyncEngine(engine), {}

    async def ask(i):
        found = await asyncio.gather(
            *(asynchronous.generate([prompt], Greedy(), max_new_tokens=30) for prompt in PROMPTS[:6])
        )
        answers[i] = [result for [result] in found]

    threads = [threading.Thread(target=run, args=(ask(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    run(asynchronous.close())
    assert outputs(answers[0]) == outputs(answers[1]) == outputs(expected)


def test_a_loop_that_ends_takes_its_searches_along(engine):
    asynchronous = AsyncEngine(engine)

    async def leaves():
        asyncio.create_task(asynchronous.generate(PROMPTS[:1], Greedy(), **ENDLESS))  # noqa: RUF006
        while not await used(asynchronous):
            await asyncio.sleep(0)

    async def after():
        assert await used(asynchronous) == 0
        await asynchronous.close()

    run(leaves())
    run(after())


def test_nothing_is_kept_after_the_end(folder):
    engine = Engine.load(folder, kv_memory=1 << 20, threads=1)
    gc.collect()
    gc.disable()
    try:

        async def test():
            async with AsyncEngine(engine) as asynchronous:
                await asynchronous.generate(PROMPTS[:2], Trie(beams=3), max_new_tokens=3)
                async for event in asynchronous.stream(PROMPTS[0], Greedy(), max_new_tokens=5):
                    if isinstance(event, Progress):
                        break
                with pytest.raises(UsageError):
                    await asynchronous.generate([[260]], Greedy())

        run(test())
        released = weakref.ref(engine)
        test = engine = None
        until = time.monotonic() + LIMIT
        while released() is not None and time.monotonic() < until:  # until the last checking thread has ended
            time.sleep(0.001)
        assert released() is None
    finally:
        gc.enable()
