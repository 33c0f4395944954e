from headrace.algorithms.corrections import Corrected, Correction, SampledTokens


def plain(tokens: SampledTokens, settings: Correction) -> Corrected:
    """REINFORCE without a correction."""
    return Corrected(tokens.advantage * tokens.logp, tokens.logp.detach() > 0.0)
