// Command registry-proxy runs the proxy before a registry. The clients' TCP
// listener is its file descriptor 3.
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
)

func main() {
	registry := flag.String("registry", "", "unix `socket` of the registry")
	control := flag.String("control", "", "unix `socket` to be controlled by")
	cert := flag.String("cert", "", "TLS certificate `file`; none: plain HTTP")
	key := flag.String("key", "", "TLS key `file`")
	flag.Parse()
	fmt.Fprintln(os.Stderr, run(*registry, *control, *cert, *key))
	os.Exit(1)
}

func run(registry, control, cert, key string) error {
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
	done := make(chan error, 2)
	go func() {
		s := &http.Server{Handler: p.Control(), ReadHeaderTimeout: time.Minute}
		done <- s.Serve(controllers)
	}()
	go func() {
		s := &http.Server{Handler: p.Handler(), ReadHeaderTimeout: time.Minute}
		if cert != "" {
			done <- s.ServeTLS(clients, cert, key)
			return
		}
		done <- s.Serve(clients)
	}()
	return <-done
}
