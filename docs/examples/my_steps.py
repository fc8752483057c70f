# my_steps.py
import random
import re


def rows(batch, size, seed, pass_rates):
    """Rows with three numbers each. They depend on the arguments alone."""
    rng = random.Random(f"{seed} {batch}")
    return [
        {"responses_create_params": {"input": []}, "numbers": rng.sample(range(2, 30), 3)}
        for _ in range(size)
    ]


class Next:
    """A game of three turns: add 1 to a number. One instance plays one episode."""

    def reset(self, row):
        """Start the episode. Returns the first observation, which is the prompt."""
        self.numbers = list(row["numbers"])
        return f"Complete the equation: {self.numbers[0]} + 1 ="

    def step(self, text):
        """Take the policy's text. Returns (observation, reward of this turn, done)."""
        answer = str(self.numbers.pop(0) + 1)
        is_right = re.findall("[0-9]+", text)[-1:] == [answer]
        reward = 1 / 3 if is_right else 0.0
        if not self.numbers:
            return None, reward, True
        return f"It is {answer}. Complete the equation: {self.numbers[0]} + 1 =", reward, False
