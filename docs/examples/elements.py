# elements.py
def row(entry):
    question = f"What is the atomic number of {entry['element']}? Say the number alone."
    return {"responses_create_params": {"input": question}, "answer": entry["number"]}
