# my_trl.py
def accuracy(completions, answer, **columns):
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().endswith(right)) for text, right in pairs]


def brief(completions, **columns):
    return [float(len(text) < 20) for text in completions]
