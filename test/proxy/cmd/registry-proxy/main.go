// Command registry-proxy runs the proxy before a registry, and the registry's
// token service. The clients' TCP listener is its file descriptor 3.
package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/token"
)

func main() {
	registry := flag.String("registry", "", "unix `socket` of the registry")
	control := flag.String("control", "", "unix `socket` to be controlled by")
	cert := flag.String("cert", "", "TLS certificate `file`; none: plain HTTP")
	key := flag.String("key", "", "TLS key `file`")
	users := flag.String("token-users", "", "`file` of lines USER:PASSWORD to give tokens to at /token; none: no token service")
	tokenCert := flag.String("token-cert", "", "certificate `file` of the token service")
	tokenKey := flag.String("token-key", "", "key `file` of the token service")
	flag.Parse()
	tokens, err := tokenService(*users, *tokenCert, *tokenKey)
	if err == nil {
		err = run(*registry, *control, *cert, *key, tokens)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// tokenService returns nil where there are no users.
func tokenService(users, cert, key string) (http.Handler, error) {
	if users == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	issuer, err := token.NewIssuer(cert, key)
	if err != nil {
		return nil, err
	}
	return issuer.Handler(users), nil
}

func run(registry, control, cert, key string, tokens http.Handler) error {
	clients, err := net.FileListener(os.NewFile(3, "clients"))
	if err != nil {
		return fmt.Errorf("take the listener over: %w", err)
	}
	if err := os.Remove(control); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	controllers, err := net.Listen("unix", control)
	if err != nil {
		return err
	}
	scheme := "http"
	if cert != "" {
		scheme = "https"
	}
	p := proxy.New(registry, scheme)
	mux := http.NewServeMux()
	mux.Handle("/", p.Handler())
	if tokens != nil {
		mux.Handle("/token", tokens)
	}
	done := make(chan error, 2)
	go func() {
		s := &http.Server{Handler: p.Control(), ReadHeaderTimeout: time.Minute}
		done <- s.Serve(controllers)
	}()
	go func() {
		s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
		if cert != "" {
			done <- s.ServeTLS(clients, cert, key)
			return
		}
		done <- s.Serve(clients)
	}()
	return <-done
}
