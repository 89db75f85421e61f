"""Finds the folder that holds a checkpoint's files (also among the snapshots of the hub's cache), and the model's
file."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from models.checkpoint.files import read_regular
from models.errors import CheckpointError, show

SNAPSHOTS, MAIN = "snapshots", Path("refs", "main")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # a file of a divided model
REVISION = re.compile(r"[\w.-]{1,100}")  # a commit, not a path
BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")  # a file in the store that all repositories of the hub's cache share
HUB_NAME = re.compile(  # org/name[@revision][:file]
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./+-]{0,200}))?(?::(?P<file>\w[^:\0]{0,300}))?",
    re.ASCII,
)
MAGIC = b"GGUF"  # the first bytes of a GGUF file
LOOKS = "org/name, org/name@revision, org/name:Q4_K_M or org/name:FILE.gguf"


@dataclass(frozen=True)
class HubName:
    """A name on the hub: a repository, one of its revisions, and a GGUF file or its quantisation ("": none)."""

    repo: str
    revision: str = "main"
    file: str = ""

    @staticmethod
    def parse(text: str) -> "HubName | None":
        """Return the repository and file that a text names; None if no repository can have such a name."""
        found = HUB_NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found["repo"] or found["repo"].endswith((".gguf", ".safetensors")):
            return None
        return HubName(found["repo"], found["revision"] or "main", found["file"] or "")

    def __str__(self) -> str:
        return self.repo + f"@{self.revision}" * (self.revision != "main") + f":{self.file}" * bool(self.file)


def snapshot(folder: Path) -> Path:
    """Return the folder of a checkpoint's files.

    For `models--org--name` of the hub's cache, or its `snapshots`, this is the revision that refs/main names, or the
    only existing one. Any other folder is returned unchanged.

    Raises:
        CheckpointError: refs/main names a missing snapshot; or it is absent, and there is not exactly one snapshot.
    """
    if (folder / "config.json").exists():
        return folder
    inside = folder / SNAPSHOTS if (folder / SNAPSHOTS).is_dir() else folder
    if not inside.is_dir() or inside.resolve().name != SNAPSHOTS:  # `resolve` fails for loops of links
        return folder
    try:
        there = sorted(path.name for path in inside.iterdir() if path.is_dir())
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", where=str(inside)) from error
    try:
        revision = read_regular(inside.resolve().parent / MAIN, 1000).decode("ascii").strip()
    except (OSError, ValueError):
        revision = there[0] if len(there) == 1 else ""
    if REVISION.fullmatch(revision) and revision in there:
        return inside / revision
    listed = ", ".join(there[:8]) or "none"
    raise CheckpointError(
        f"a folder of the hub's cache, and refs/main names no snapshot that is there (there are: {listed})",
        where=str(folder),
        remedy=f"Name a folder in {SNAPSHOTS}, or download the model again.",
    )


def check_there(model: str | Path) -> None:
    """Check that a path is a folder or a GGUF file; a name on the hub is accepted. Raises CheckpointError."""
    if not str(model):
        raise CheckpointError("the name of the model is empty", remedy=f"Name a folder, a GGUF file, or {LOOKS}.")
    path = Path(model)
    try:
        try:
            path.stat()  # `exists` hides other errors since Python 3.14
        except (FileNotFoundError, NotADirectoryError, ValueError):
            if HubName.parse(str(model)) is not None:
                return
        if is_gguf_file(path):
            path.stat()
            return
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"the file cannot be read: {error.strerror}", where=show(model)) from error
    check_folder(path)


def check_folder(folder: Path) -> None:
    """Check that a folder exists. Raises CheckpointError."""
    if not folder.is_dir():
        is_file = "is a file, but no GGUF file: name the folder it lies in"
        what = is_file if folder.exists() else "there is no such folder"
        raise CheckpointError(
            f"model folder: {what}",
            where=show(folder),
            remedy="A model is a GGUF file, or a folder with config.json, *.safetensors and a tokenizer; "
            f"commands that load one also take its name on the Hugging Face hub: {LOOKS}.",
        )


def is_gguf_file(path: Path) -> bool:
    """Whether a path names a GGUF file, by its end or by the file's first bytes: in stores of other programs the names
    are digests."""
    if path.is_dir() or path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return True  # the reader of the file says why


def gguf_file(path: Path) -> Path | None:
    """Return a checkpoint's GGUF file: `path` itself, or the only model in a folder without config.json; else None.

    The file of a split model is its first one.

    Raises:
        CheckpointError: a folder without config.json has several models.
    """
    if is_gguf_file(path):
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted({PART.sub(r"\1-00001-of-\3.gguf", file.name) for file in path.glob("*.gguf")})
    if len(found) > 1:
        listed = ", ".join(map(show, found[:8]))
        remedy = "Name one of the files."
        raise CheckpointError(f"the folder holds {len(found)} GGUF models: {listed}", where=show(path), remedy=remedy)
    return path / found[0] if found else None


def is_blob(target: Path, repository: Path, digest: str) -> bool:
    """Whether a file is a blob of a repository in the hub's cache, or that blob's file in the store that all share."""
    blob, store = repository / "blobs" / digest, repository.parent / "blobs"
    if not blob.is_symlink():
        return target == blob
    return target.is_relative_to(store) and BLOB.fullmatch(target.relative_to(store).as_posix()) is not None


def name_of(path: Path) -> str:
    """Return the name of a checkpoint: that of its folder or file, or in the hub's cache that of its repository.
    Bytes that are not UTF-8 are replaced."""
    if is_gguf_file(path):
        name = path.name.removesuffix(".gguf")  # in the hub's cache a link to a blob, whose name is a digest
    else:
        folder = path.resolve()
        name = folder.name
        if folder.parent.name == SNAPSHOTS and folder.parents[1].name.startswith("models--"):
            name = folder.parents[1].name.rpartition("--")[2]
    return os.fsencode(name).decode(errors="replace")
