package storage

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// insecureRegistries are the registries that may be spoken to without TLS or with an unknown certificate.
type insecureRegistries struct {
	names    map[string]bool
	networks []netip.Prefix
}

// parseInsecureRegistries reads CRI-O's insecure_registries: entries in CIDR notation are networks, all others names.
func parseInsecureRegistries(entries []string) (insecureRegistries, error) {
	out := insecureRegistries{
		names:    make(map[string]bool),
		networks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
	}
	for _, e := range entries {
		if strings.TrimSpace(e) == "" {
			return insecureRegistries{}, fmt.Errorf("insecure registry %q: %w: empty entry", e, ErrInvalidReference)
		}
		if network, err := netip.ParsePrefix(e); err == nil {
			out.networks = append(out.networks, network)
			continue
		}
		out.names[e] = true
	}
	return out, nil
}

// match tells whether registry, "host" or "host:port", is one of i. Like CRI-O, it looks a host name up to compare its
// addresses with the networks; a host that cannot be looked up matches by name only.
func (i insecureRegistries) match(registry string, lookup func(host string) ([]net.IP, error)) bool {
	if i.names[registry] {
		return true
	}
	host, _, err := net.SplitHostPort(registry)
	if err != nil {
		host = strings.Trim(registry, "[]")
	}
	ips, err := lookup(host)
	if err != nil {
		return false
	}
	for _, ip := range ips {
		addr, ok := netip.AddrFromSlice(ip)
		if !ok {
			continue
		}
		for _, network := range i.networks {
			if network.Contains(addr.Unmap()) {
				return true
			}
		}
	}
	return false
}
