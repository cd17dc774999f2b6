"""The one folder that ``harness run`` puts on PYTHONPATH; it holds sitecustomize and no more."""
