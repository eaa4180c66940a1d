"""Running a playbook through ansible-runner."""
