"""The training engine on Megatron-Core: its process groups, pipeline schedules and gradient buffers."""

from moejob_trainer.megatron.without_compiler import import_megatron

import_megatron()
