"""Models named on the Hugging Face hub: `org/name[@revision][:file]` becomes a path in the hub's cache.

Only loading calls this (`Engine.load`, the flags of command lines); batch lines and HTTP requests never do.
`huggingface_hub` is imported only when a name is not a path; it reads HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE
and the like, and shows its progress bars.
"""

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.load.hub_files import Needed, architecture_of, needed
from engine.load.hub_headers import SUFFIXES, write_outline
from engine.load.options import LoadOptions
from engine.version import __version__
from models.errors import show
from models.families import family_of
from models.folders import SNAPSHOTS, HubName

COMMIT = re.compile(r"[0-9a-f]{40}")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
WEB_ERRORS = 400  # and above: statuses of refused HTTP requests


def located(options: LoadOptions, progress: bool = True) -> LoadOptions:
    """The options with a path in place of each name on the hub; the models that are not in its cache are fetched.

    Args:
        progress: show progress bars on a terminal.

    Raises:
        CheckpointError: a model cannot be fetched.
    """
    roles = ("folder", "draft", "reward")
    paths = {role: path for role in roles if isinstance(path := getattr(options, role), str | Path)}
    found = {role: local_path(path, progress) for role, path in paths.items()}
    return options if found == paths else replace(options, **found)


def local_path(model: str | Path, progress: bool = True) -> str | Path:
    """The path of a model: `model` itself if it exists or cannot be a name on the hub; otherwise its place in the
    hub's cache, into which it is fetched if necessary. Raises CheckpointError."""
    if (name := _name_of(model)) is None:
        return model
    with _errors(name), _bars(progress):
        return _Repository(name).fetch()


@contextlib.contextmanager
def outlined(model: str | Path, progress: bool = True) -> Iterator[tuple[str | Path, int]]:
    """Find a model like `local_path`, but of weights that are not in the cache fetch only the headers.

    Yields:
        The path, in a temporary folder if files are not in the cache; and the bytes that those files have.
    """
    if (name := _name_of(model)) is None:
        yield model, 0
        return
    with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
        with _errors(name), _bars(progress):
            found = _Repository(name).outline(Path(folder))
        yield found


def _name_of(model: str | Path) -> HubName | None:
    """The model's name on the hub; None if it is a path."""
    return None if os.path.lexists(model) else HubName.parse(str(model))


class _Repository:
    """A repository of the hub, and its files in the cache."""

    def __init__(self, name: HubName):
        from huggingface_hub import HfApi

        self.name, self.api = name, HfApi(library_name="coppice", library_version=__version__)
        self.where = f"{self.api.endpoint}/{name.repo}"
        self.offline = False

    def fetch(self, again: bool = False) -> Path:
        """Fetch the model; returns its folder or GGUF file. `again`: the revision got a new commit meanwhile."""
        commit, chosen, folder = self._chosen()
        if folder is None:
            # One after another, in this thread: Ctrl-C ends it at once, and weights in the cache imply all other files.
            first, *others = chosen.files
            folder = self._download(first, self.name.revision).parents[first.count("/")]  # notes the revision's commit
            if folder.name != commit and again:
                what = f"{self.name}: the hub names commit {commit} and gives files of {folder.name}"
                raise CheckpointError(
                    what, where=self.where, remedy="run it again, or name the commit: org/name@COMMIT"
                )
            if folder.name != commit:  # the revision has just got a new one
                return self.fetch(again=True)
            for file in others:
                self._download(file, commit)
        return folder / chosen.gguf

    def outline(self, scratch: Path) -> tuple[Path, int]:
        """The folder or the GGUF file, fetched or with outlines of the weights, and how many bytes they lack.

        Args:
            scratch: an empty folder, in which a folder like one of the hub's cache is made.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        commit, chosen, folder = self._chosen()
        if folder is not None or self.offline:
            return self.fetch(), 0
        headers = build_hf_headers(library_name="coppice", library_version=__version__)
        folder = scratch / f"models--{self.name.repo.replace('/', '--')}" / SNAPSHOTS / commit
        missing = 0
        for file in chosen.files:
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in SUFFIXES:
                url = hf_hub_url(self.name.repo, file, revision=commit, endpoint=self.api.endpoint)
                missing += write_outline(url, headers, path)
            else:
                path.symlink_to(self._download(file, commit))
        return folder / chosen.gguf, missing

    def _chosen(self) -> tuple[str, Needed, Path | None]:
        """The commit, the files of the model, and their folder in the cache; None: not all are there."""
        commit, files = self._files()
        folder = self._cached()
        try:
            chosen = needed(files, self.name.file, self.where, lambda file: self._read(commit, file))
        except CheckpointError as error:
            if not self.offline:
                raise
            what = f"of {self.name} the hub's cache has only a part, and the hub is not asked: {error.what}"
            raise CheckpointError(what, where=str(folder), remedy=error.remedy) from error
        if not chosen.gguf:  # before gigabytes are fetched in vain
            family_of(architecture_of(self._read(commit, "config.json")), f"{self.where}: config.json")
        whole = folder and folder.name == commit and all((folder / file).is_file() for file in chosen.files)
        return commit, chosen, folder if whole else None

    def _files(self) -> tuple[str, list[str]]:
        """The commit and its files; without a network, the files in the cache."""
        from huggingface_hub import constants

        try:
            seconds = constants.HF_HUB_ETAG_TIMEOUT
            info = self.api.model_info(self.name.repo, revision=self.name.revision, timeout=seconds)
            if not info.sha:
                raise ValueError("the answer names no commit")
            return info.sha, [each.rfilename for each in info.siblings or ()]
        except (TypeError, KeyError) as error:
            raise ValueError("the answer describes no model") from error
        except _network_errors() as error:
            folder = self._cached()
            if folder is None or not _is_away(error):
                raise
            if not _is_offline(error):
                said = f"{self.api.endpoint} is out of reach: {self.name} is used as it was fetched before"
                warnings.warn(said, stacklevel=2)
            self.offline = True
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            return folder.name, files

    def _read(self, commit: str, file: str) -> Path:
        folder = self._cached() if self.offline else None
        return self._download(file, commit) if folder is None else folder / file

    def _download(self, file: str, revision: str) -> Path:
        return Path(self.api.hf_hub_download(self.name.repo, file, revision=revision))

    def _cached(self) -> Path | None:
        """The folder of the revision in the cache, which may not have all its files; None if there is none."""
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE, f"models--{self.name.repo.replace('/', '--')}")
        commit = self.name.revision
        if not COMMIT.fullmatch(commit):
            try:
                commit = (cache / "refs" / commit).read_text("ascii").strip()
            except (OSError, ValueError):
                return None
        folder = cache / SNAPSHOTS / commit
        return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Progress bars of the library, shown or not."""
    from huggingface_hub import utils

    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _network_errors() -> tuple[type[Exception], ...]:
    """The errors that the library raises when a request fails: its own, and those of the HTTP client that it uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), OSError


@contextlib.contextmanager
def _errors(name: HubName) -> Iterator[None]:
    """Context that turns errors of the library into CheckpointErrors."""
    try:
        yield
    except (*_network_errors(), ValueError) as error:
        raise _error_of(name, error) from error


def _status(error: Exception) -> int:
    """The HTTP status of an error or its cause; 0 if there is none."""
    told = getattr(getattr(error, "response", None), "status_code", None)
    if told is None and isinstance(cause := error.__cause__, Exception):
        return _status(cause)
    return told or 0


def _is_away(error: Exception) -> bool:
    """Whether an error means that the hub does not answer, rather than that it refuses."""
    return _status(error) in (0, 408, 429) or _status(error) >= 500


def _is_offline(error: BaseException | None) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return error is not None and (isinstance(error, OfflineModeIsEnabled) or _is_offline(error.__cause__))


def _error_of(name: HubName, error: Exception) -> CheckpointError:
    """The CheckpointError for an error of the library."""
    from huggingface_hub import constants, errors

    where, here = f"{constants.ENDPOINT}/{name.repo}", f"there is no file or folder {show(name)} here"
    reason = show(str(error).strip().partition("\n")[0]) or type(error).__name__
    if _is_offline(error):
        what = f"{here}, the hub's cache ({constants.HF_HUB_CACHE}) does not have all of it, and HF_HUB_OFFLINE is set"
        return CheckpointError(what)
    if isinstance(error, errors.GatedRepoError):
        what = f"{name.repo} is gated: its owners choose who may fetch it"
        remedy = f"ask for access on its page; {LOGIN}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"{here}, and no model {name.repo} on the hub that you may see"
        remedy = f"check the name; for a private model {LOGIN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        what, remedy = f"{name.repo} has no revision {show(name.revision)}", "its page lists branches and commits"
    elif isinstance(error, errors.HFValidationError):
        what, remedy = f"{here}, and the hub has no such names: {reason}", "a name on the hub is org/name"
    elif (status := _status(error)) >= WEB_ERRORS and not _is_away(error):
        what, remedy = f"the hub refuses {show(name)}: status {status}", f"check the name, and {LOGIN}"
    elif isinstance(error, OSError) and error.errno and error.filename:
        return CheckpointError(f"the hub's cache cannot be written: {error.strerror}", where=show(error.filename))
    else:
        what = f"{here}, and fetching it from the hub failed: {reason}"
        remedy = "check the network and HF_ENDPOINT, and run it again: complete files are kept"
    return CheckpointError(what, where=where, remedy=remedy)
