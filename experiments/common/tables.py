"""Tables in Markdown."""


def head(*names: str) -> str:
    """Return the two lines on top of a table."""
    return f"{line(*names)}\n{'|---' * len(names)}|"


def line(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def clock(seconds: float) -> str:
    """Return seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
