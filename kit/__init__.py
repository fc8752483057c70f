"""The infrastructure of Quintet. You need not read it to change a task or an algorithm.

    errors     the exceptions
    features   the methods of optional features, and the table by which the rest finds them
    config/    load recipes over verl's configuration, check them, load custom functions
    data/      rows, the episode record and its file format, selection, metrics
    gym/       start and stop Gym servers, route rows to verifiers, limit concurrency
    rollout/   chat formats, the client of the rollout engine, the OpenAI-compatible policy endpoint
    runs/      command line, preparation, launch, run folder, console, checkpoints, signals
    cpu/       everything that only a machine without GPU needs

A package imports only from those above it, and from env.py and gym_client.py. training.py and
inference.py stand between rollout/ and runs/ and do not import each other. Nothing imports a module
of cpu/, or of the folders extras/ and lab/, by name, except features and verl's keys.
"""
