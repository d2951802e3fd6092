"""The benchmark suite: `python -m tests.benchmarks FOLDER` measures thunderpatch beside everything else."""
