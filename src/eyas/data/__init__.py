"""Chats -> corpus: what people have, into token ids and a loss mask.

sources/     files and layouts -> rows            template/    rows -> token ids and loss mask
prepare/     both, for whole inputs, with filters, accounts and worker processes
regenerate/  answers by the target itself         corpus.py    what prepare writes and everyone else reads
"""
