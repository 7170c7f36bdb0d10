"""From the sources of spec.data to documents of token ids, and the order in which they are trained on.

`preparation` turns sources into token files once, before the first step; `stream` draws global batches from those.
`prompt_preparation` does the same for GRPO; `prompt_loader` draws prompts.
Knows nothing of Megatron, of ranks other than data-parallel ones, or of what the loss does with a document.
"""
