"""A model that is all state and no work: what a fault costs does not depend on what is computed."""

import os

import torch

MATRICES = 20
WIDTH = int(os.environ.get("FAULTS_WIDTH", "2048"))  # a smaller width is only for trying the benchmark


class WrittenGradient(torch.autograd.Function):
    """A loss whose backward writes a whole gradient for every parameter."""

    @staticmethod
    def forward(ctx, value, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.value = value
        return parameters[0].detach().flatten()[0].clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, *(torch.full_like(p, ctx.value * float(gradient)) for p in ctx.saved_tensors)


class MatrixModel(torch.nn.Module):
    """20 matrices of 2048 x 2048: 83,886,080 parameters of float32."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((WIDTH, WIDTH), 0.01) for _ in range(MATRICES))

    def forward(self, value):
        return WrittenGradient.apply(value, *self.weights)
