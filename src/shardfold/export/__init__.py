"""Into other training stacks: what each can say, the best of it, and its own file for it."""
