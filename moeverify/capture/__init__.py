"""Recording a training script as it is: what its optimizer gets and does, and in which order it is called."""
