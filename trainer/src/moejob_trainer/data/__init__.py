"""From the sources of spec.data to documents of token ids, and the order in which they are trained on.

`corpus.prepare` turns sources into token files once, before the first step; `stream` draws global batches from those.
Knows nothing of Megatron, of ranks other than data-parallel ones, or of what the loss does with a document.
"""
