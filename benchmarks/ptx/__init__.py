"""Runs on a CPU what Triton compiles for an NVIDIA GPU: its PTX, one instruction after another, in numpy.

Triton's interpreter follows the source of a kernel; here it is what the compiler made of it: tiles spread over threads,
products of tensor cores, copies that are under way while others work. All threads of a program take an instruction
together, and programs follow one another. What a GPU leaves undefined ends the run: an address outside of what the
launch was given or not on its boundary, memory that threads share without a barrier between, and programs that touch
what others write. Neither time nor the order in which a GPU adds up can be had from it.

Source: NVIDIA, PTX ISA 8.7; written for the instructions that Triton emits for capabilities 8.0 to 9.0 and 12.0.
"""
