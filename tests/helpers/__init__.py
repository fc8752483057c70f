"""What several test modules use: rows and recipes, models, servers, whole runs, and doubles."""

import os

# verl reads these when it is first imported. A run of algorithm.py takes them from
# configs/machines/cpu.yaml.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.engine.verl_patches",
}
