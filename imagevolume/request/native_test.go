package request_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

func TestNativeExec(t *testing.T) {
	const domain = request.NativeExecDomain
	const fault = "native image volumes of container server of pod shop/web-0: annotation "
	for name, tc := range map[string]struct {
		annotations map[string]string
		exec        bool
		fault       string
	}{
		"none":             {nil, false, ""},
		"others":           {map[string]string{request.Domain: "[{", domain + ".example": "x", "exec." + domain: "x"}, false, ""},
		"pod":              {map[string]string{domain + "/pod": "true"}, true, ""},
		"bare":             {map[string]string{domain: "true"}, true, ""},
		"container":        {map[string]string{domain + "/container.server": "true"}, true, ""},
		"not":              {map[string]string{domain: "false"}, false, ""},
		"most specific":    {map[string]string{domain: "true", domain + "/pod": "x", domain + "/container.server": "false"}, false, ""},
		"of another":       {map[string]string{domain + "/container.client": "true"}, false, ""},
		"fault of another": {map[string]string{domain + "/container.client": "yes"}, false, ""},
		"value":            {map[string]string{domain + "/pod": "yes"}, false, domain + `/pod: "yes" is neither "true" nor "false"`},
		"case":             {map[string]string{domain: "True"}, false, domain + `: "True" is neither "true" nor "false"`},
		"empty":            {map[string]string{domain: ""}, false, domain + `: "" is neither "true" nor "false"`},
		"misspelt": {
			map[string]string{domain + "/contaner.x": "true"},
			false,
			domain + "/contaner.x: unknown key; did you mean " + domain + "/container.x?",
		},
		"other key": {
			map[string]string{domain + "/vol": "true"},
			false,
			domain + "/vol: unknown key; known are " + domain + ", " + domain + "/pod and " + domain + "/container.NAME",
		},
		"no container name": {
			map[string]string{domain + "/container.A": "true"},
			false,
			domain + `/container.A: "A" is not a container name; write ` + domain + "/container.NAME",
		},
	} {
		t.Run(name, func(t *testing.T) {
			exec, err := request.NativeExec(web, tc.annotations, "server")
			assert.Equal(t, tc.exec, exec)
			if tc.fault == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, fault+tc.fault)
		})
	}
}
