package imageservice

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// Whatever a client asks for, it gets a handler that is known, the one that it
// named, and by annotation only one that pods may choose.
func FuzzChoose(f *testing.F) {
	c := chooser{
		handlers: map[string]Handler{
			DefaultRoot: {}, "runc": {}, "vm": {Root: "vm"}, "wasm": {Root: "wasm", AllowAnnotation: true},
		},
		routes: []Route{{"registry.example/vm/**", "vm"}, {"**/*:wasm", "wasm"}},
	}
	f.Add("registry.example/a:1", "", "", "")
	f.Add("registry.example/vm/a:1", "", "", "")
	f.Add("a:wasm", "runc", "", "")
	f.Add("a", "", "wasm", "vm")
	f.Add("a", "", "", "vm")
	f.Add("registry.example/vm/a", "", "vm", "")
	f.Add(strings.Repeat("a", 64), "no such", "runc", "")
	f.Fuzz(func(t *testing.T, image, handler, own, containerd string) {
		spec := &cri.ImageSpec{
			Image: image, RuntimeHandler: handler,
			Annotations: map[string]string{HandlerAnnotation: own, ContainerdHandlerAnnotation: containerd},
		}
		routed := c.route(image)
		require.Contains(t, c.handlers, routed)
		chosen, err := c.choose(spec)
		if err != nil {
			require.ErrorIs(t, err, errHandler)
			return
		}
		require.Equal(t, c.handlers[chosen.name], chosen.Handler)
		switch {
		case handler != "":
			require.Equal(t, handler, chosen.name)
		case own != "":
			require.Equal(t, own, chosen.name)
		case containerd != "":
			require.Equal(t, containerd, chosen.name)
		default:
			require.Equal(t, routed, chosen.name)
		}
		if handler == "" && chosen.root() != c.handlers[routed].root() {
			require.True(t, chosen.AllowAnnotation)
		}
	})
}

// Credentials are those of the request or refused, and never told in the error.
func FuzzCredentials(f *testing.F) {
	f.Add("", "", "", "", "")
	f.Add("user", "password", "", "", "")
	f.Add("", "", "dXNlcjpwYXNzd29yZA==", "", "")
	f.Add("user", "password", "dXNlcg==", "identity", "registry")
	f.Add("", "", "not base64", "", "")
	f.Fuzz(func(t *testing.T, user, password, auth, identity, registry string) {
		got, err := credentials(&cri.AuthConfig{
			Username: user, Password: password, Auth: auth, IdentityToken: identity, RegistryToken: registry,
		})
		if err != nil {
			require.ErrorIs(t, err, storage.ErrInvalidReference)
			require.Contains(t, []string{"not base64", "not user:password"}, err.Error()[strings.LastIndex(err.Error(), "not "):])
			return
		}
		if got == nil {
			require.Empty(t, user+password+identity+registry+strings.Trim(auth, "Og=\r\n"))
			return
		}
		require.Equal(t, identity, got.IdentityToken)
		require.Equal(t, registry, got.RegistryToken)
		if auth == "" {
			require.Equal(t, user, got.Username)
			require.Equal(t, password, got.Password)
		}
	})
}
