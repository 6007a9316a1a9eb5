"""What a model reads: text prepared into token shards, synthetic tokens, datasets of the user's own.

`prepare.prepare` turns text into a folder of token shards, `batches.open_dataset` opens what a job names, and
`batches.batches` deals it out to the ranks. Importing this package imports neither torch nor numpy.
"""
