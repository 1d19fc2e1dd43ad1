// Package token is the token service of a private registry: it signs JSON Web
// Tokens that say who may do what with which repository, as the specification
// of distribution's token authentication has it.
//
// Any of its users may pull from and push to any repository.
package token

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
)

// Names that the registry's configuration must have, too.
const (
	IssuerName = "node"
	Service    = "registry"
)

// lifetime is that of a token.
const lifetime = 5 * time.Minute

// Issuer signs tokens. It is made by [NewIssuer].
type Issuer struct{ signer jose.Signer }

// NewIssuer returns an issuer that signs with an ECDSA key; the registry trusts
// its certificate.
func NewIssuer(certFile, keyFile string) (*Issuer, error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("load the key of the token service: %w", err)
	}
	chain := []string{base64.StdEncoding.EncodeToString(pair.Certificate[0])}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: pair.PrivateKey},
		new(jose.SignerOptions).WithType("JWT").WithHeader("x5c", chain))
	if err != nil {
		return nil, fmt.Errorf("make the signer of the token service: %w", err)
	}
	return &Issuer{signer}, nil
}

type access struct {
	Type    string   `json:"type"`
	Name    string   `json:"name"`
	Actions []string `json:"actions"`
}

// Sign returns a token by which the user may pull from and push to the
// repositories.
func (i *Issuer) Sign(user string, repositories ...string) (string, error) {
	granted := []access{}
	for _, name := range repositories {
		granted = append(granted, access{"repository", name, []string{"pull", "push"}})
	}
	now := time.Now()
	return jwt.Signed(i.signer).Claims(jwt.Claims{
		Issuer: IssuerName, Subject: user, Audience: jwt.Audience{Service},
		IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(lifetime)),
	}).Claims(map[string]any{"access": granted}).Serialize()
}

// RefreshToken is what a user may give in place of the password (CRI's
// identity_token).
func RefreshToken(user, password string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(user + ":" + password))
}

// Handler serves clients. users is a file of lines USER:PASSWORD, read anew for
// each of them. Who says nothing about himself gets a token for nothing.
func (i *Issuer) Handler(users string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, known, err := whose(r, users)
		switch {
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		case !known && user != "":
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"incorrect username or password"}]}`, http.StatusUnauthorized)
			return
		}
		var repositories []string
		for _, scope := range r.Form["scope"] {
			for one := range strings.FieldsSeq(scope) {
				if part := strings.Split(one, ":"); known && len(part) == 3 && part[0] == "repository" {
					repositories = append(repositories, part[1])
				}
			}
		}
		signed, err := i.Sign(user, repositories...)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"token": signed, "access_token": signed, "expires_in": int(lifetime.Seconds())})
	})
}

// whose says who asks, and whether it is one of the users.
func whose(r *http.Request, users string) (user string, known bool, err error) {
	if err := r.ParseForm(); err != nil {
		return "", false, err
	}
	user, password, given := r.BasicAuth()
	if r.Method == http.MethodPost {
		plain, _ := base64.RawURLEncoding.DecodeString(r.PostForm.Get("refresh_token"))
		user, password, _ = strings.Cut(string(plain), ":")
		given = true
		if user == "" {
			user = "unknown"
		}
	}
	if !given {
		return "", false, nil
	}
	content, err := os.ReadFile(users)
	if err != nil {
		return "", false, err
	}
	return user, slices.Contains(strings.Fields(string(content)), user+":"+password), nil
}
