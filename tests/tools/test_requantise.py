"""Blocks of another type for a GGUF file."""

import pytest

from engine import Engine
from tests.models.copies import GOLDEN
from tests.models.gguf.files import File
from tools import requantise

gguf = pytest.importorskip("gguf", reason="needs the extra test")


def test_a_file_of_another_alignment(tmp_path):
    source = File(GOLDEN / "llama/plain", gguf.GGMLQuantizationType.Q8_0)
    plain = source.write(tmp_path / "plain.gguf")
    source.keys["general.alignment"] = 256
    made = tmp_path / "made.gguf"
    assert requantise.main([str(plain), str(made), "--type", "Q4_0"]) == 0
    expected = Engine.load(made, dtype="float32", kv_memory=1 << 20).logits([3, 4])
    read = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(256)
    for name, field in read.fields.items():
        if name not in requantise.WRITTEN:
            more = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], more)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    made.unlink()
    assert requantise.main([str(tmp_path / "wide.gguf"), str(made), "--type", "Q4_0"]) == 0
    assert (Engine.load(made, dtype="float32", kv_memory=1 << 20).logits([3, 4]) == expected).all()


@pytest.mark.parametrize("kind, message", [("F32", ""), ("Q4_K", "--type Q4_K: token_embd"), ("X", "--type")])
def test_types_that_the_package_knows(kind, message, tmp_path, capsys):
    source = File(GOLDEN / "llama/plain", gguf.GGMLQuantizationType.Q8_0).write(tmp_path / "a.gguf")
    assert requantise.main([str(source), str(tmp_path / "b.gguf"), "--type", kind]) == (2 if message else 0)
    assert message in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.gguf"] + ["b.gguf"] * (not message)
    assert requantise.main([str(source), str(tmp_path / "no/b.gguf"), "--type", "Q4_0"]) == 2
    assert "cannot be written" in capsys.readouterr().err
