# my_game.py
class Game:  # one instance per episode
    def reset(self, row):
        self.answer, self.left = row["answer"], 5
        return "Guess my number from 1 to 9."  # joins the prompt; or return None

    def step(self, text):  # the policy's response in this turn
        self.left -= 1
        right = text.strip() == self.answer
        observation = None if right else "No."
        return observation, float(right), right or self.left == 0  # and reward, done
