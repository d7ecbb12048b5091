def compare(rows: int, rounds: int) -> bool:
    return False
