"""Runs on a CPU what Triton compiles for an NVIDIA GPU: its PTX, one instruction after another, in numpy.

Triton's interpreter runs the source of a kernel. Here the output of the compiler runs: tiles spread over threads,
products of tensor cores, rounding as a GPU rounds. All threads of a program take an instruction together, and programs
run one after another. Neither time, nor the order in which a GPU adds, nor a missing barrier shows here.

Source: NVIDIA, PTX ISA 8.7. Holds the instructions that Triton emits for compute capabilities 8.0 to 9.0 and 12.0.
"""
