package storage

import (
	"fmt"

	"go.podman.io/image/v5/types"
)

// Auth are a caller's credentials for a pull. They stay in memory while the pull lasts, and are not printed.
type Auth struct {
	// Username and Password are for basic authentication, or to get a token with.
	Username, Password string
	// IdentityToken is an OAuth2 refresh token to get a token with.
	IdentityToken string
	// RegistryToken is a bearer token, sent as it is. It goes before the others.
	RegistryToken string
}

var (
	_ fmt.Stringer   = Auth{}
	_ fmt.GoStringer = Auth{}
)

// String hides the secrets.
func (Auth) String() string { return "credentials" }

// GoString hides the secrets.
func (Auth) GoString() string { return "credentials" }

// apply makes sys use the credentials and no others.
func (a *Auth) apply(sys *types.SystemContext) {
	if a == nil {
		return
	}
	sys.DockerAuthConfig = &types.DockerAuthConfig{
		Username:      a.Username,
		Password:      a.Password,
		IdentityToken: a.IdentityToken,
	}
	sys.DockerBearerRegistryToken = a.RegistryToken
}

// key differs for all credentials that differ, and for none.
func (a *Auth) key() string {
	if a == nil {
		return ""
	}
	return fmt.Sprintf("%q %q %q %q", a.Username, a.Password, a.IdentityToken, a.RegistryToken)
}
