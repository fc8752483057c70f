"""The infrastructure of Quintet. You need not read it to change a task or an algorithm.

    errors     the exceptions
    features   the methods of optional features, and the table by which the rest finds them
    recipe/    load YAML over verl's configuration, check it, load custom functions
    chat/      chat templates, thoughts, tool calls: messages to token ids, and back
    data/      rows, the episode record and its file format, selection, metrics
    verify/    start and stop Gym servers and Python verifiers, route rows, limit concurrency
    engine/    the client of the rollout engine, its patches, the OpenAI-compatible policy endpoint
    run/       command line, preparation, launch, run folder, console, checkpoints, signals
    cpu/       everything that only a machine without GPU needs

A package imports only from those above it, and from env.py and gym_client.py. training.py and
inference.py stand between engine/ and run/ and do not import each other. Nothing imports a module
of cpu/, or of the folders extras/ and lab/, by name, except features and verl's keys.
"""
