"""What a model computes, as functions of tensors; knows no module, no configuration and nothing of Megatron."""
