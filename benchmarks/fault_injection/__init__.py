"""Cases of training that is disturbed, and what is made of their logs."""
