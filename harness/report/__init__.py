"""What a person and a machine get to see of a run of race cases."""
