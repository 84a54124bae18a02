"""The target model, known from its checkpoint alone.

checkpoint   `Target`: architecture, default layers, fingerprint, named tensors
weights      named tensors of safetensors files, one or sharded
embeddings   input embeddings and lm_head found in the files, read by row
head         `Head`: lm_head and what the config does to logits, for log-probabilities without the model
special_tokens  ids that the target ends with, and added ones
decoder      the text decoder inside a transformers model
norm         `FinalNorm`: the target's own final norm
cpu_math     elementwise functions that are right at their first call, too
"""
