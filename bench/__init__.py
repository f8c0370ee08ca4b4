"""Benchmarks: against peers, and against the physical limit.

| file | contents |
| --- | --- |
| `__main__` | the command: `python -m bench` |
| `dispatch` `load` `decode` `generate` `cold` `capped` `larger` `update` `small` | the cases |
| `gguf_files` `llama_cpp.mjs` | a token from a GGUF file: the case, and the program that runs llama.cpp |
| `cache` `teachers` `row_stores` | tables of rows: the cases, and the stores that are compared |
| `gpu` | the tests and figures of an accelerator: `make gpu` |
| `main_job` | the main job on real input: `make run` |
| `architectures` | every transformers architecture, from disk: `python -m bench.architectures` |
| `tiny` `overrides` `probes` `equality` | its configurations, exceptions, inputs, and definition of equal |
| `peers` | the ways of having a model on disk that are compared |
| `models` `scale` | what is measured, and at what size |
| `limits` | the limits of the machine |
| `rounds` | each arm in turn, and the resulting figures |
| `apart` `page_cache` `memory_cap` `process` | the environment of a trial |
| `report` `machine` | the table, the JSON, the charts |
"""
