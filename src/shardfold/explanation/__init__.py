"""Why a plan is as it is: terms of the cost, alternatives, and what would have to change."""
