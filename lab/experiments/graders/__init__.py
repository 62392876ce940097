"""Our grader of mathematics against cases from outside."""
