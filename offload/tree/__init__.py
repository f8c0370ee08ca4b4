"""Nested data on disk: dicts, lists, tuples, dataclasses and named tuples of tensors, numbers and text.

| module | what |
| --- | --- |
| `saved` | `save_tree` and `load_tree`: a folder, its manifest, and which files may be in it |
"""
