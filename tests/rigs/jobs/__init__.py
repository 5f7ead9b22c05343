"""Whole jobs: real entry points of Megatron and of frameworks, in processes of their own, to their end.

startup  what their Pythons run first: `on_cpu` before the first import of Megatron
on_cpu   the CPU in the place of GPUs, gloo of NCCL, and a fused Adam; nothing of it imports megapatch
flags    a tiny GPT for Megatron's own scripts
kills    what a rank notes on its way, and where it is killed
frameworks, slime, nemo_rl, skyrl, verl  what these need besides, in a Ray of the job's own (local_ray)
llama, edge  what some of them share: a tiny model, rollouts, and lines of the weights and metrics that they get
job      runs a job, plain or with megapatch, and reads what it has left
"""
