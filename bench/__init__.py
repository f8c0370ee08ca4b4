"""Measurements: against peers, and against the physical limit.

| file | what it holds |
| --- | --- |
| `__main__` | the command: `python -m bench` |
| `dispatch` `load` `decode` `generate` `cold` `capped` `larger` `update` `small` | the cases |
| `cache` `row_stores` | tables of rows: the case, and the ways to keep them that are compared |
| `main_job` | the main job on real input: `make run` |
| `architectures` | every architecture of transformers, from disk: `python -m bench.architectures` |
| `tiny` `overrides` `probes` `equality` | its configurations, their exceptions, inputs, and what equal is |
| `peers` | the ways to have a model on disk that are compared |
| `models` `scale` | what is measured, and at which size |
| `limits` | what the machine can do at most |
| `rounds` | each arm in turn, and the figures that come of it |
| `apart` `page_cache` `memory_cap` `process` | a trial's surroundings |
| `report` `machine` | the table, the JSON, the charts |
"""
