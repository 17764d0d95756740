"""What compute devices the machine has and how full they are; measures, never decides."""
