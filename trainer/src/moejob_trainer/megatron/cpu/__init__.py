"""Megatron-Core without CUDA: the few of its modules that the trainer uses see a torch whose device is the CPU.

Nothing global is patched: torch itself stays as it is, for Transformers' loading breaks silently when its factories
are replaced. A stand-in takes the name `torch` inside Megatron's modules only. Each entry of `stand_in.py` gives
its reason, and `tests/trainer/megatron/cpu/test_stand_in.py` fails when Megatron no longer needs it.
"""

from moejob_trainer.megatron.cpu.stand_in import use_cpu

__all__ = ["use_cpu"]
