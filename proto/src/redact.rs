//! `Debug` of the messages that hold a reuse domain: shapes only, since a domain id is a capability and never reaches a log.

use crate::worker::{DraftOpenRequest, FetchBlocksRequest, GenerateRequest, SharedPrefix};
use std::fmt;

// === impl Debug ===

impl fmt::Debug for GenerateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GenerateRequest")
            .field("request_id", &self.request_id)
            .field("tenant_tag", &self.tenant_tag)
            .field("prompt_tokens", &self.prompt_tokens.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SharedPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPrefix").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl fmt::Debug for FetchBlocksRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FetchBlocksRequest").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DraftOpenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DraftOpenRequest")
            .field("tenant_tag", &self.tenant_tag)
            .field("prompt_tokens", &self.prompt_tokens.len())
            .field("choice", &self.choice)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_id_is_never_printed() {
        let secret = vec![0xab; 32];
        let request = GenerateRequest {
            domain_id: secret.clone(),
            shared_prefix: Some(SharedPrefix { shared_domain_id: secret.clone(), tokens: 3 }),
            ..Default::default()
        };
        let open = DraftOpenRequest { domain_id: secret.clone(), ..Default::default() };
        let fetch = FetchBlocksRequest { domain_id: secret.clone(), ..Default::default() };
        let shared = SharedPrefix { shared_domain_id: secret, tokens: 3 };
        for text in [format!("{request:?}"), format!("{open:?}"), format!("{fetch:?}"), format!("{shared:?}")] {
            assert!(!text.contains("171"), "{text}");
            assert!(!text.contains("domain"), "{text}");
        }
    }
}
