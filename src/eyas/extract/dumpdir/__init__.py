"""Engine over servers that were patched to dump `req_N/` folders: no identity, so every dump is proven by its content.

layout     where a dump keeps what, and how its pieces become states (pure)
matching   which dump may be whose: by count, by content, and when to refuse (pure)
content    the reply's log-probabilities against lm_head x last
gate       several rows in flight, never two of one length
folder     what changed in the dump folder since a request was sent; its lock
desk       one row's look at what is new: dumps read, counted and compared
flags      what must be given, never guessed; words: what a person is told when a probe fails
loading    files into tensors: no code in them runs, nothing larger than agreed, nothing half written
engine     `DumpDirEngine`
"""
