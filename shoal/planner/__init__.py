"""What a plan needs and takes, known beforehand. Imported from top to bottom:

- answers: `search` (`candidates`), `picture`, `page` (`strategies`), `predict`, `pool`, `show`; `choose`, the rule without a
  simulation
- of a record: `memory` (with `allocator`) and `timing` (with `replay`, `cost` and `profile`)
- the record of a step: `pipelines` (few micro-batches and ranks for many, with `record`), `extend` (few blocks for many, with
  `repeat`), `simulate`, `work` (what a job trains)
- what stands for the real thing: `compiled` (with `fusion`), `buckets`, `stages`, `works`, `tape` (with `mode`), `fake_device`,
  `streams`
- what a record is made of: `trace`, `launch`, `workspace`
"""
