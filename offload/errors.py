"""The errors, for the person who reads them.

Always true:
- every error is an `OffloadError` and also the builtin exception that a caller would expect
- whatever is wrong with a file is a `FileError`
- a message says what happened, to which tensor, in which file, and what to do
- control characters in it are visible: names from files can't move the cursor, or hide text
"""

from __future__ import annotations

# Control characters, marks of direction, separators of lines, and halves of characters, as Python writes them.
_SHOWN = {
    code: repr(chr(code))[1:-1]
    for codes in (
        *(range(0x20), range(0x7F, 0xA0), (0x061C, 0x200B, 0x200E, 0x200F, 0xFEFF)),
        *(range(0x2028, 0x202F), range(0x2060, 0x2070), range(0xD800, 0xE000)),
    )
    for code in codes
}
_SHOWN_IN_LINES = {code: text for code, text in _SHOWN.items() if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """Text from a file for people to read: control characters as Python writes them (`\\x1b`), on one line."""
    return text.translate(_SHOWN)


def visible_lines(text: str) -> str:
    """As `visible`, for text with line breaks and tabs."""
    return text.translate(_SHOWN_IN_LINES)


class OffloadError(Exception):
    """Base of every error that `offload` raises on purpose."""

    def __str__(self) -> str:
        if isinstance(self, OSError) and self.strerror is not None:
            return visible_lines(f"{self.filename}: {self.strerror}" if self.filename is not None else self.strerror)
        return visible_lines(BaseException.__str__(self))  # KeyError would quote the message


class ArgumentError(OffloadError, ValueError):
    """An argument of the right type whose value can't be used."""


class ArgumentTypeError(OffloadError, TypeError):
    """An argument of the wrong type."""


class UnsupportedOpError(OffloadError, NotImplementedError):
    """An op that is not supported on an offloaded tensor."""


class UnsupportedTorchError(OffloadError, ImportError):
    """This torch lacks something that a feature needs: one of its internals, or a package beside it."""


class UnsupportedTransformersError(OffloadError, ImportError):
    """This transformers lacks something that a feature needs."""


class ExportError(OffloadError, BufferError, TypeError):
    """A value that can't be handed out as an array, or through DLPack, as it is."""


class DeviceError(OffloadError, RuntimeError):
    """A device that this machine, or this torch, does not have."""


class BudgetError(OffloadError, ValueError):
    """The values to keep resident exceed the memory budget."""


class FileError(OffloadError):
    """A file that can't be used: it is missing, damaged, changed or somebody else's, or can't be read or written.

    Each of these has a class of its own; catch this one to skip a file, whatever is wrong with it.
    """


class MissingFileError(FileError, FileNotFoundError):
    """The file of a tensor, or of a checkpoint, is not there."""


class MissingKeyError(OffloadError, KeyError):
    """A tensor, or an entry, that a file or folder does not have."""


class CorruptFileError(FileError, ValueError):
    """A file of tensors that is truncated or damaged, or that is something else."""


class ReadError(FileError, OSError):
    """A file that can't be read now, but may be complete: too many open files, a failing disk, no permission."""


class ChangedFileError(FileError, RuntimeError):
    """A referenced file is no longer the one that was opened."""


class ForeignFileError(FileError, FileExistsError):
    """A file that `offload` did not create is where it would write."""


class NameInUseError(OffloadError, ValueError):
    """A name that a live tensor has in the folder, or under which an earlier one left its file."""


class WriteError(FileError, OSError):
    """A value could not be written; the old one, if any, is kept."""


class ShapeMismatchError(OffloadError, ValueError):
    """A new value has another shape than the stored one."""


class DtypeMismatchError(OffloadError, TypeError):
    """A new value has another dtype than the stored one."""


class StaleViewError(OffloadError, RuntimeError):
    """A view whose stored value has since changed its shape or dtype."""


class SavedTensorError(OffloadError, RuntimeError):
    """A tensor that was saved for backward has been modified since."""


class UnknownSubclassError(OffloadError, TypeError):
    """A stored tensor subclass that is not on the allow-list."""


class UnknownTypeError(OffloadError, TypeError):
    """A value in nested data that can't be stored, or a class that the reader did not allow."""


class CheckpointError(OffloadError, ValueError):
    """A checkpoint that is incomplete, inconsistent, of another model, or holds code."""


class DeviceMapError(OffloadError, ValueError):
    """A device map that cannot be followed."""


class MetaTensorError(OffloadError, RuntimeError):
    """A model still has tensors without data after loading."""


class JournalError(OffloadError, ValueError):
    """A run that writes a checkpoint, and can't be started or resumed."""


class MapError(OffloadError, RuntimeError):
    """The function of `map_values`, torchao or peft failed on a value; or one for batches raised StopIteration."""


class CacheError(OffloadError, ValueError):
    """A cache of rows that is not what was asked for: of another version, with other metadata, closed, read-only."""


class ColumnError(OffloadError, KeyError):
    """A column that a cache does not have, or one that is missing from a write."""


class RowIndexError(OffloadError, IndexError):
    """Rows that a cache does not have, or an index that does not name rows."""


class MissingRowsError(OffloadError, LookupError):
    """Rows of a cache that are not filled."""


__all__ = [*sorted(name for name, kind in globals().items() if isinstance(kind, type))]
