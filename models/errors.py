"""The errors that the two lowest packages raise; `engine.errors` adds the rest."""


class CoppiceError(Exception):
    """An error meant for the user: what went wrong, where, and what to do about it, a line each.

    `exit_code` is the status of a command line that ends with it, `code` its name in JSON records.
    """

    exit_code = 1
    code = "internal"

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what, where, remedy)

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.where, self.remedy) if line)


class CheckpointError(CoppiceError):
    """A file of the model's folder is absent, damaged, unsupported, or contradicts another one."""

    exit_code = 3
    code = "checkpoint"
