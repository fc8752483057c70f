# my_tokens.py
import sys
from pathlib import Path

from transformers import AutoTokenizer

from kit.data.rollout_files import from_record, read_records

decode = AutoTokenizer.from_pretrained("models/SmolLM2-135M-Instruct").decode
_, record = next(read_records(Path(sys.argv[1])))  # the first episode of the file
episode = from_record(record, record["_episode"].get("row", {}))
end_of_last_turn = 0
for (begin, end, _), reward in zip(episode.turns, episode.turn_rewards, strict=True):
    observed = episode.response_ids[end_of_last_turn:begin]
    sampled = episode.response_ids[begin:end]
    if observed:
        print("observed", len(observed), repr(decode(observed)))
    print("sampled ", len(sampled), repr(decode(sampled)), f"reward {reward:.2f}")
    end_of_last_turn = end
