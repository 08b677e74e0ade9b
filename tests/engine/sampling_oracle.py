"""The sampling rules once more, in float64, slow and obvious: one row, one step after the other."""

import numpy as np


def adjusted(logits, params, prompt=(), output=(), stop_ids=()):
    """Logits after bias, penalties and min_tokens."""
    out = [float(x) for x in logits]
    for token, value in (params.logit_bias or {}).items():
        out[token] += value
    for token in set(prompt) | set(output):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(output):
        out[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in stop_ids:
            out[token] = -np.inf
    return np.array(out)


def distribution(logits, params):
    """(probabilities float64 [V], margin): ``margin`` is how close the nearest decision was to going the other way."""
    vocab = len(logits)
    if params.temperature < 1e-5:
        return np.eye(vocab)[int(np.argmax(logits))], 1.0
    scores = (logits - np.max(logits)) / max(params.temperature, 0.01)
    margin = 1.0

    if params.min_p > 0:
        floor = np.log(float(np.float32(params.min_p)))
        margin = min([margin, *(abs(s - floor) for s in scores if s != 0)])
        scores = np.array([s if s >= floor else -np.inf for s in scores])

    if params.top_k > 0:
        kth = sorted(scores, reverse=True)[min(params.top_k, vocab) - 1]
        scores = np.array([s if s >= kth else -np.inf for s in scores])

    if np.float32(params.top_p) < 1:
        probabilities = np.exp(scores) / np.exp(scores).sum()
        cut = 1 - float(np.float32(params.top_p))
        worst_first = sorted(range(vocab), key=lambda i: (scores[i], -i))
        mass = 0.0
        for i in worst_first[:-1]:
            mass += probabilities[i]
            if probabilities[i] > 0:
                margin = min(margin, abs(mass - cut))
            if mass <= cut:
                scores[i] = -np.inf
    return np.exp(scores) / np.exp(scores).sum(), margin
