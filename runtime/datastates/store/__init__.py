"""What is on disk: names, votes and manifests, the commit protocol, the catalog, retention, the journal.

Standard library only, so that ``ckpt-run status`` starts at once; nothing here imports the rooms above it. Read in this order:

=============== ==========================================================================================
layout          names and paths
document        JSON files that carry a checksum of themselves, and how strictly they are read
regular         files found on disk are opened without waiting for what is none
durable         writes that survive a power cut
checksums       CRC-32 of files, in ranges and in parallel
manifest        votes, manifests, abandonments
commit          the protocol, step by step
runrecord       ``run.json``: which run, which lineages
lineage         which training a checkpoint belongs to
verify, stock   whether a checkpoint is whole: one of ours against its manifest, one of stock Trainer by its shape
catalog         list, newest, fall back, where to resume
retention       which checkpoints go
journal         events; launches, summary: what ``ckpt-run status`` reads
=============== ==========================================================================================
"""
