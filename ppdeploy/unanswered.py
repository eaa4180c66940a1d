"""Why this machine, the controller, got no answer over HTTPS: words and remedy for the hub and for a mirror alike."""

from __future__ import annotations


def unanswered(error: BaseException, also: str) -> tuple[str, str]:
    """Return what went wrong, to be put behind the other side's name, and what to look at on the controller.

    `also` is what else is to be looked at where nothing answered. ppdeploy_proxy and ppdeploy_ca_bundle are the nodes'.
    """
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        remedy = (
            "set SSL_CERT_FILE in the controller's environment to a file with your company's certificates, such as "
            "/etc/ssl/certs/ca-certificates.crt (for the nodes: ppdeploy_ca_bundle)"
        )
        return "has a certificate that this machine does not trust", remedy
    return (
        f"did not answer ({type(error).__name__})",
        f"check the controller's network (behind a proxy, HTTPS_PROXY in its environment) and {also}",
    )
