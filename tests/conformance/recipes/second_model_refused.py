"""A second model with an optimizer of its own, and the session knows the first model alone."""

import recipe
import torch

AREA = "Own loops"
REFUSED = "changes parameters that are not in the attached model, so each replica would train them by its own"

teacher, student = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
second = torch.optim.SGD(teacher.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy

if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(student, optimizer)
    loader = session.loader(recipe.Samples(), global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss_fn(teacher(x), y).backward()
            step.backward(loss_fn(student(x), y))
        optimizer.step()
        second.step()
        optimizer.zero_grad()
        second.zero_grad()
    session.close()
