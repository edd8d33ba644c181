"""Loading of cases from files, with every rule of axes, choices and recipes. No torch."""
